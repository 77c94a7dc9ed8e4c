"""Smooth policies by regularising the critic's action gradient (PAVE), and the actor-critic hosts it works on."""
