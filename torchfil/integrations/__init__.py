"""The engine inside other training loops: Lightning and Hugging Face.

Each needs its package (an extra).
"""
