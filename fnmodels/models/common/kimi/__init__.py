"""What Kimi Linear and Kimi K3 share: their config.json; and the parameters of Kimi K3."""
