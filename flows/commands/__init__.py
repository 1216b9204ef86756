"""The commands of `mgrpo`, a file for each thing that people do. Heavy imports wait until a command needs them."""
