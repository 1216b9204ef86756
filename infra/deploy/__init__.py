"""What a deployment consists of: settings that all of them share, and the services as local processes (`mgrpo up`)."""
