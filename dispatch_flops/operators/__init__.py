"""What one operator call costs: registry, conventions, formulas; stateless, knows no module."""
