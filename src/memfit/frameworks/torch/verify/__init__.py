"""Steps that show how well memfit predicts the device in hand, and what is measured of it."""
