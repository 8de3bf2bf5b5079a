//! A page that a daemon serves to its operator.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::str::FromStr;

use super::hosts::PAGE_WAIT;

/// What a daemon answered.
#[derive(Debug, Clone)]
pub struct Page {
    /// The status code of HTTP.
    pub code: u16,
    /// The text.
    pub body: String,
}

impl Page {
    /// Asks for a page on a new connection.
    pub(super) fn get(mut stream: TcpStream, path: &str) -> io::Result<Self> {
        stream.set_read_timeout(Some(PAGE_WAIT))?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: daemon\r\nconnection: close\r\n\r\n"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Self::parse(&answer).ok_or_else(|| {
            let what = format!("expected an answer in HTTP, got {answer}");
            io::Error::new(io::ErrorKind::InvalidData, what)
        })
    }

    fn parse(answer: &str) -> Option<Self> {
        let (head, body) = answer.split_once("\r\n\r\n")?;
        Some(Self {
            code: head.split(' ').nth(1)?.parse().ok()?,
            body: body.to_owned(),
        })
    }

    /// A metric's value, by all of its line up to the space.
    pub fn number<T: FromStr>(&self, name: &str) -> Option<T> {
        let of_name = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
        self.body.lines().find_map(of_name)
    }
}

#[cfg(test)]
mod tests {
    use super::Page;

    #[test]
    fn a_number_is_found_by_its_whole_name() {
        let answer = "HTTP/1.1 200 OK\r\na: b\r\n\r\nup_most 7\nup{node=\"n1\"} 3\nup 0.5\n";
        let page = Page::parse(answer).expect("it is HTTP");
        assert_eq!(page.code, 200);
        assert_eq!(page.number("up"), Some(0.5));
        assert_eq!(page.number("up_most"), Some(7_u64));
        assert_eq!(page.number("up{node=\"n1\"}"), Some(3_u64));
        assert_eq!(page.number::<u64>("up_m"), None);
        assert!(Page::parse("HTTP/1.1 200 OK\r\n").is_none());
    }
}
