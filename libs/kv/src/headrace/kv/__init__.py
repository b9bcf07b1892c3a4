"""Block identity, block pool, prefix index, grants and tickets: decisions about KV memory as pure code.

Knows which block is whose and when it may be used again. Does no I/O, reads no clock (time is passed in), never sees
a tensor and imports no other room. Bytes are moved by `headrace.transfer`, words by `headrace.bus`.
"""
