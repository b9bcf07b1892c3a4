"""The kvstore service: KV shared by all workers, in one DRAM arena that they read and write out of band."""
