"""What encoders of waves share."""
