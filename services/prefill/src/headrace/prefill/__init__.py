"""The prefill service: runs prompts and writes their KV into a decode node's memory."""
