"""Readers, samplers and simulators that several data modules share."""
