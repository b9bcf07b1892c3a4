"""DeepSeek-V3 and V2 (V3, R1, V2-Lite, Moonlight, Kimi-K2): multi-head latent attention and mixture of experts."""
