"""What CPU backends lower to the oneDNN that torch carries."""
