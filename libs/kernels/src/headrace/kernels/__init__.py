"""Hot operations of DeepSeek-family models: each file holds one operation, as a torch reference and a Triton kernel.

`cpu/` has compiled loops beside some of them, for small models on a CPU.

Importing the package, or any reference in it, needs torch alone; Triton is needed at the first kernel launch.
"""
