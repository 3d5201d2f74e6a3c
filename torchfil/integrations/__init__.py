"""The engine inside other people's training loops: Lightning, Hugging Face. Each needs its package (an extra)."""
