"""A capture campaign: everything worth measuring on a machine with a GPU, in one command.

``python -m trioflow.campaign`` needs a checkout, Python, torch, torchvision,
transformers, pandas, pyarrow and msgspec; no network and no workflow manager.
"""
