"""The commands of `warmroute`, one module each; imported only when they are called."""
