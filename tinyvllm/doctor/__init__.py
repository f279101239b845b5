"""Checks of a machine before an engine starts, each with what to do. Imports no tinygrad: a check that needs it imports it."""
