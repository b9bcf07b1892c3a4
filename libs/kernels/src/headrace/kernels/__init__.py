"""Hot operations of DeepSeek-family models: each file holds one operation, as a torch reference and a Triton kernel.

Importing the package, or any reference in it, needs torch alone; Triton is needed at the first kernel launch.
"""
