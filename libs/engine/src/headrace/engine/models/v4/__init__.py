"""DeepSeek-V4 (V4-Flash): compressed sparse and heavily compressed attention, hash-routed first layers, mHC."""
