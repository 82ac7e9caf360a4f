"""From text to batches: corpora, tokenizers, indexed datasets.

In: files of text. Out: batches of tokens that name their position. Never: a model.
"""
