"""The models people train, tiny, each trained privately and compared with brute force; see docs/models.md."""
