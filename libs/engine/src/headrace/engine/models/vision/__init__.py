"""The image side of a multimodal checkpoint: pixels in, the embeddings of an image's tokens out. Apart from the text model."""
