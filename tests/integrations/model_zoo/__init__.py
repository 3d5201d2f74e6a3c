"""The models people train, tiny, each trained privately and compared with brute force.

See docs/models.md.
"""
