//! Places for connections, and who has them. Where all are taken a newcomer either waits, or is given the place of whoever has the most:
//! so no address keeps others out, nor its own next connection, however many it opens.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep_until};

/// Nobody gives way sooner: most requests are answered within that, and who opens connections without end takes no more than
/// some hundreds of places in a second.
const OWN_TIME: Duration = Duration::from_millis(50);

/// What becomes of who comes while all places are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenFull {
    /// It waits for a place.
    Wait,
    /// The oldest connection of the address that has the most gives way.
    Displace,
}

/// Who is counted as one: an address, or a network of IPv6, where one host has as many addresses as it likes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ClientHost(IpAddr);

impl ClientHost {
    fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = address.to_bits() >> 64 << 64;
                Self(Ipv6Addr::from_bits(network).into())
            }
            address @ IpAddr::V4(_) => Self(address),
        }
    }
}

/// All places.
pub struct HttpPlaces {
    count_max: usize,
    taken: Mutex<TakenPlaces>,
    freed: Notify,
}

#[derive(Default)]
struct TakenPlaces {
    next: u64,
    /// In the order in which they came.
    guests: BTreeMap<u64, Guest>,
}

struct Guest {
    host: ClientHost,
    since: Instant,
    /// Its end is what tells it that it gives way.
    _told: oneshot::Sender<()>,
}

/// There is no place now.
struct Full {
    /// When somebody will have to give way, if nobody leaves before.
    until: Option<Instant>,
}

/// A place that is somebody's until it is dropped, or given to another.
pub struct HttpPlace {
    places: Arc<HttpPlaces>,
    number: u64,
    stays: oneshot::Receiver<()>,
}

impl HttpPlaces {
    pub fn new(count_max: usize) -> Arc<Self> {
        Arc::new(Self {
            count_max,
            taken: Mutex::default(),
            freed: Notify::new(),
        })
    }

    /// A place for a connection from there, once there is one.
    pub async fn take(self: &Arc<Self>, from: IpAddr, when_full: WhenFull) -> HttpPlace {
        let host = ClientHost::of(from);
        loop {
            let Full { until } = match self.try_take(host, when_full) {
                Ok(place) => return place,
                Err(full) => full,
            };
            let due = async {
                match until {
                    Some(until) => sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.freed.notified() => {}
                () = due => {}
            }
        }
    }

    fn try_take(
        self: &Arc<Self>,
        host: ClientHost,
        when_full: WhenFull,
    ) -> Result<HttpPlace, Full> {
        let mut taken = self.taken();
        if taken.guests.len() >= self.count_max {
            match when_full {
                WhenFull::Wait => return Err(Full { until: None }),
                WhenFull::Displace => taken.displace(host)?,
            }
        }
        let number = taken.next;
        taken.next += 1;
        let (told, stays) = oneshot::channel();
        let since = Instant::now();
        let guest = Guest {
            host,
            since,
            _told: told,
        };
        taken.guests.insert(number, guest);
        Ok(HttpPlace {
            places: self.clone(),
            number,
            stays,
        })
    }

    fn taken(&self) -> MutexGuard<'_, TakenPlaces> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TakenPlaces {
    /// Takes a place from whoever has the most, the newcomer's own counted with what it would have then.
    fn displace(&mut self, newcomer: ClientHost) -> Result<(), Full> {
        let mut counts = BTreeMap::from([(newcomer, 1)]);
        for guest in self.guests.values() {
            *counts.entry(guest.host).or_insert(0) += 1;
        }
        let most = counts.values().copied().max();
        let oldest = self
            .guests
            .iter()
            .find(|(_, guest)| counts.get(&guest.host).copied() == most);
        let Some((&number, guest)) = oldest else {
            return Err(Full { until: None });
        };
        let until = guest.since + OWN_TIME;
        if Instant::now() < until {
            return Err(Full { until: Some(until) });
        }
        tracing::debug!(address = %guest.host.0, "its oldest HTTP connection gives way to another");
        self.guests.remove(&number);
        Ok(())
    }
}

impl HttpPlace {
    /// Ends when it is another's.
    pub async fn lost(&mut self) {
        // Nothing is ever said: the other end is dropped.
        let _ = (&mut self.stays).await;
    }
}

impl Drop for HttpPlace {
    fn drop(&mut self) {
        self.places.taken().guests.remove(&self.number);
        self.places.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{sleep, timeout};

    use super::*;

    async fn take(places: &Arc<HttpPlaces>, from: &str) -> HttpPlace {
        let from = from.parse().unwrap();
        let taken = places.take(from, WhenFull::Displace);
        timeout(Duration::from_secs(1), taken).await.unwrap()
    }

    async fn is_lost(place: &mut HttpPlace) -> bool {
        timeout(Duration::from_millis(1), place.lost())
            .await
            .is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_has_the_most_gives_way_and_of_its_own_the_oldest() {
        let places = HttpPlaces::new(4);
        let mut other = take(&places, "10.0.0.2").await;
        let mut many = Vec::new();
        for _ in 0..3 {
            many.push(take(&places, "10.0.0.1").await);
        }
        let _third = take(&places, "10.0.0.3").await;
        assert!(is_lost(&mut many[0]).await && !is_lost(&mut other).await);
        // With one more it would be the one that has the most.
        many.push(take(&places, "10.0.0.1").await);
        assert!(is_lost(&mut many[1]).await && !is_lost(&mut other).await);
        assert!(!is_lost(&mut many[2]).await && !is_lost(&mut many[3]).await);
        assert_eq!(places.taken().guests.len(), 4);
        drop(many);
        assert_eq!(places.taken().guests.len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn many_addresses_hold_nobody_up_either() {
        let places = HttpPlaces::new(4);
        let mut held = Vec::new();
        for host in 1..=40 {
            held.push(take(&places, &format!("127.0.0.{host}")).await);
        }
        let mut newest = take(&places, "10.0.0.1").await;
        assert!(is_lost(&mut held[36]).await && !is_lost(&mut held[37]).await);
        assert!(!is_lost(&mut newest).await);
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_just_come_is_not_sent_away() {
        let places = HttpPlaces::new(1);
        let mut first = take(&places, "10.0.0.1").await;
        let from = "10.0.0.2".parse().unwrap();
        let second = places.take(from, WhenFull::Displace);
        let mut second = std::pin::pin!(second);
        assert!(timeout(OWN_TIME / 2, &mut second).await.is_err());
        assert!(!is_lost(&mut first).await);
        let _second = second.await;
        assert!(is_lost(&mut first).await);
    }

    #[tokio::test(start_paused = true)]
    async fn where_nobody_gives_way_newcomers_wait() {
        let places = HttpPlaces::new(1);
        let mut first = take(&places, "10.0.0.1").await;
        let from = "10.0.0.2".parse().unwrap();
        let second = places.take(from, WhenFull::Wait);
        let mut second = std::pin::pin!(second);
        assert!(timeout(Duration::from_secs(60), &mut second).await.is_err());
        assert!(!is_lost(&mut first).await);
        drop(first);
        let mut second = second.await;
        sleep(OWN_TIME).await;
        assert!(!is_lost(&mut second).await);
    }

    #[test]
    fn a_host_is_counted_as_one() {
        let host = |text: &str| ClientHost::of(text.parse().unwrap());
        assert_eq!(host("::ffff:10.0.0.1"), host("10.0.0.1"));
        assert_eq!(host("2001:db8:0:1::1"), host("2001:db8:0:1:ffff::2"));
        assert_ne!(host("2001:db8:0:1::1"), host("2001:db8:0:2::1"));
        assert_ne!(host("127.0.0.1"), host("127.0.0.2"));
    }
}
