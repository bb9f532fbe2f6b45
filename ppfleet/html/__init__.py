"""Templates and charts that all pages share."""
