"""DeepSeek-V4.1: CSA2 attention, single-pass mHC, MoE, Engram, CED."""
