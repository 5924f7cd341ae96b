"""Supervised training: SFT and DPO on given examples."""
