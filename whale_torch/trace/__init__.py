"""Recording what a model does between its stages (docs/design.md 5.4): pure, on a copy without memory."""
