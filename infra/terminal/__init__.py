"""What a terminal is shown of a store: text that steers nothing, and tables whose numbers stay whole."""
