"""The disk cache: its location (`place`), safe file access (`folder`), authentication (`seal`), keys (`key`), and plans
(`store`)."""
