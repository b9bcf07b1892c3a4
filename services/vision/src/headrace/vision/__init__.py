"""The vision service: images to identities (digest, token count) and to the embeddings of their tokens."""
