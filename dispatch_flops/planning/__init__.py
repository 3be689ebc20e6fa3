"""Plans of training steps: run on the meta device, then held against a machine's limits."""
