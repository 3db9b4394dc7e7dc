"""The engine as a process: its socket, its protocol, the client of it, and how runs are found."""
