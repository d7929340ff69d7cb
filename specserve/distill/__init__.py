"""Training a draft for a target: text that the target writes, students that share its embedding and head."""
