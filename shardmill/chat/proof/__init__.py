"""Proof of a template's loss mask: a certificate, or the smallest conversation that refutes it.

battery/     the conversations as JSON lines, as people write them
examples.py  the conversations on which a mask is proved: one rendered, and one that fails shown
prove.py     `prove_mask` and its checks
"""
