"""Counterparts of the TrioSim paper's figures 6 to 16: their data, their drawings, their page."""
