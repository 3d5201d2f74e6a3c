"""One private step: record → sums, norms and accounting → checks → stage → release → book.

forwards       what went through the model: inputs, outputs, masks, the gradient at the outputs
asking         the batch with other answers to the run's questions
values         the results of a pass over a batch: losses, norms, clipped sums, what the ledger adds
captured       that pass as a CUDA graph
memory         passes that run out of memory: repeated in smaller pieces
evaluation     which pass serves a batch: recorded, or mapped over examples
batch_checks   is it the batch that was read, with each example in its own row?
rows           were inputs made from several rows of a batch?
checks         what the loop did compared with what the engine computed
opacus_faults  why Opacus's gradients may differ
stages         what both entry points have in common
pipeline       everything in order; the user's loop and ``train_step`` are the two entry points
"""
