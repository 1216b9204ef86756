"""`mgrpo ui`: pages in a browser over a run's store. Reads only; needs the extra `ui`."""
