"""`mgrpo up`: the services of a deployment as processes of this machine, started in order, found again, stopped."""
