"""Turns rows on disk, or the generated task, into tokenised prompts and demonstrations in a resumable order."""
