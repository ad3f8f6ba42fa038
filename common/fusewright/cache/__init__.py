"""What is kept on disk between processes: where it lies (`place`), how files are read and written (`folder`), that they are
this user's own (`seal`), what they are found under (`key`), and plans (`store`)."""
