"""Conversations: records to messages, whatever shape they were written in."""
