"""Code that several rooms share: state transitions, row locks, lease ends, wakeups, watermarks, signing keys."""
