"""DeepSeek-V4.1 on a GPU: the same forward pass as `..model`, put together from `headrace.kernels`."""
