"""Making of the bundled models: data, tokenizer, training, export, evaluation. Start with `python -m models.training --help`.

Uses libs/engine for the network and libs/recipe for prompts, so that what is trained is what is served; no library knows it.
"""
