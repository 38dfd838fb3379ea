"""Config fields and convolutions that encoders of raw waves share."""
