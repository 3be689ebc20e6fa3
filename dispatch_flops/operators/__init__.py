"""What one operator call costs: registry, conventions and formulas; stateless, knows no modules."""
