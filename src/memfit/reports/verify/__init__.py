"""Reports of verifications."""
