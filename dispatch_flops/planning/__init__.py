"""Plans of training steps: run on the meta device, then compared with a machine's limits."""
