"""Measured truth and the models it is measured on; not part of the installed package."""
