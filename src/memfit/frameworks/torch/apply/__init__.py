"""Puts the settings of a plan into practice on PyTorch objects, and finds out what a plan has to know about them."""
