"""Prompts, chat rendering, recorded answers on disk, and the batches made of them."""
