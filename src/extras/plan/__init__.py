"""Searches for the fastest mesh, remat policy and batch of a model on given hardware."""
