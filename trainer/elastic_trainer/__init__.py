"""Inside the training pods: session, commit protocol, drain, data position."""
